"""What a person sees: progress, tables, the demo's page."""
