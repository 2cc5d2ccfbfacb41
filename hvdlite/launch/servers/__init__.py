"""Jobs with parameter servers: some ranks serve, and the others may die and be started again."""
