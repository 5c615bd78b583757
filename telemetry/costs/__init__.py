"""What the fleet costs, and whom for: prices, the division of paid hours, break-even."""
