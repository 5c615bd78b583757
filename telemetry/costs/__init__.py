"""The cost of the fleet by tenant: prices, the division of paid hours, break-even."""
