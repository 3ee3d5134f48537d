"""The changes, in their order; one that was released is never edited."""
