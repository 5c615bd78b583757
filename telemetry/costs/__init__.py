"""The cost of the fleet by tenant: prices, division of paid hours, and break-even with APIs."""
