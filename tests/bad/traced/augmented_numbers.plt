import "../base/digits.plt"

model {
  network = [linear(2)]
}

data {
  source = parquet("../base/numbers.parquet", augment = [random_horizontal_flip()]) #! E0337
}
