"""The cockpit: pages in the browser for the planner and, beside an engine, for what it does."""
