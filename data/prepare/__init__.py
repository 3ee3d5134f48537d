"""Turn the files of a data card into arrays that training maps into memory: fetch, check, read, split, transform."""
