"""Object-centric slot models; they share the trainer and the data plan of `sparo_train`."""
