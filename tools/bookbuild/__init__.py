"""What builds the book: mdBook, the executed chapters, their pages, the checks."""
