"""The steps of the line, as thin Prefect tasks, and the engine and witnesses they drive."""
