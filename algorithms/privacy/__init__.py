"""Privacy, from the bottom up: accounting, mechanisms, barrier; the ledger and the card stand beside them."""
