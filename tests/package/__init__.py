"""What stands beside the floors: configuration, errors, keys, names, the build, the sources."""
