"""What a mixture of experts does besides products: choosing slots, ordering rows, summing up."""
