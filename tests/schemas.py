"""Hypothesis strategies for random values with the keywords of JSON schemas. Most
values are not sensible schemas."""

from hypothesis import strategies as st

words = st.sampled_from(
    "type properties required items anyOf allOf oneOf $ref enum const pattern minimum maximum minLength maxLength"
    " format additionalProperties prefixItems minItems maxItems object array string integer number null # #/items"
    " date not if then else contains minContains maxContains uniqueItems minProperties maxProperties propertyNames"
    " dependentRequired dependentSchemas dependencies patternProperties unevaluatedProperties multipleOf $anchor $id a"
    " exclusiveMinimum additionalItems ^a #a".split()
)
anything = st.recursive(
    words
    | st.integers(-5, 5)
    | st.booleans()
    | st.none()
    | st.text(max_size=3)
    | st.floats(-9, 9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4)
    ),
    max_leaves=20,
)
