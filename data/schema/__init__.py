"""What a data card may say, as strict models; the cards themselves are YAML files in `data/cards`."""
