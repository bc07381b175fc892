"""From images to features on a grid."""
