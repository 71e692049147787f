"""Makes the tests' shared conftest a part of a package: as a folder of the import path, this one would hide packages
that its folders are named after, such as lightning, where they are not installed."""
