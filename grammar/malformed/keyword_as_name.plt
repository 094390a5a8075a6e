param none = 3

data {
  true = 1
}

param {
  width = 3
}
