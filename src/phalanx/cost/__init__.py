"""What a step costs. No torch."""
