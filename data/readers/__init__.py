"""One reader a format; `data.prepare.reading` chooses among them."""
