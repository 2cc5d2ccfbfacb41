"""The command hvdlite-run: its flags, its configuration file, and --doctor."""
