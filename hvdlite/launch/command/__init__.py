"""The command hvdlite-run: its command line, its configuration file, and --doctor."""
