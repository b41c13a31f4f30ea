from tests.published import block_fp8, flagship, published

__all__ = ["block_fp8", "flagship", "published"]
