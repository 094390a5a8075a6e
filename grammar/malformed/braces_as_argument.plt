data {
  source = python("a:b", {"size": 3})
  batch  = 64
}
