"""Text to terminal lines, without widgets: splitting a stream into blocks, Markdown, wrapping, one message as a list of parts."""
