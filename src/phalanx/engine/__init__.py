"""What runs next. No torch."""
