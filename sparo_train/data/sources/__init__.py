"""Sources of samples: formats of data sets, and the servers that they are on."""
