"""The model `auto`: the choice of the model that answers, and of a stand-in for one that cannot."""
