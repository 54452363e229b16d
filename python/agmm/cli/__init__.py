"""The commands of `agmm`."""
