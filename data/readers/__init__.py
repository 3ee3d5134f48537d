"""One reader per format; `data.reading` chooses among them."""
