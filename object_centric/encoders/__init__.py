"""Encoders of images to features on a grid."""
