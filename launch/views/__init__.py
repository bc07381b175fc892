"""Output for users: progress, tables, the demo's page."""
