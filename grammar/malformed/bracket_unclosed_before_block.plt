param sizes = [1, 2

data {
  batch = 64
}
