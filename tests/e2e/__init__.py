"""End to end: the whole stack through its public interfaces. A package, so that its stacks stop after its last test."""
