from base import data
