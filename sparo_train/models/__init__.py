"""Read-outs and towers; a model never knows its rank."""
