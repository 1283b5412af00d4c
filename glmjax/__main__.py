"""``python -m glmjax`` is the ``glmjax`` command."""

from glmjax.cli import main

if __name__ == "__main__":
    main()
