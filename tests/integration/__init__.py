"""One service against real servers. A package, so that the shared servers stop after its last test."""
