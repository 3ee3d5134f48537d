"""Readers by kind of records: rows, texts and images; `data.reading` chooses among them."""
