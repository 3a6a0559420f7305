"""What runs on top of the engine: the command line, batch files, measurements."""
