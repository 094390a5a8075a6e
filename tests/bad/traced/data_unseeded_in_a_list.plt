import "../base/vectors.plt"

model {
  network = [linear(8), relu(), linear(4)]
}
data {
  source = python("entropies:unseeded_in_a_list") #! E0655
}
