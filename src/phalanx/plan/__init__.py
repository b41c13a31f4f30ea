"""What to deploy: fit, prediction, choice, price and recipes. No torch."""
