import "../base/digits.plt"

data {
  sampler = weighted(python("weights:of_too_few")) #! E0318
}
