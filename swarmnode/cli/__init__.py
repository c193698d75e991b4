"""What a person types. Every command imports what it needs when it runs, so that --help is instant."""
