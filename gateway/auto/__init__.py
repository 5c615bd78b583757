"""The model `auto`, which chooses another model for each request, and stand-ins for models."""
