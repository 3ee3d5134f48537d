"""One reader a format; `data.reading` chooses among them."""
