"""The schema of a data card as strict models; the cards are YAML files in `data/cards`."""
