"""One reader per format; `data.prepare.reading` chooses among them."""
