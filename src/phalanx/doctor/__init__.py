"""Is this machine what it should be: facts gathered in one place, judged in another."""
