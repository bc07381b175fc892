"""Object-centric slot models; they share the trainer, the data plan and the scene renderer of `sparo_train`."""
