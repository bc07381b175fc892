"""Object-centric slot models, with the trainer and the data plan of `sparo_train`."""
