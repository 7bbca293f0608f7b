"""What is not one package's: configuration, errors, keys, names, the build, the sources."""
