"""The model `auto`, which chooses the model that answers, and a stand-in if that one cannot."""
