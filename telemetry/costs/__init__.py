"""The cost of the fleet: prices, the division of paid hours among tenants, and break-even."""
