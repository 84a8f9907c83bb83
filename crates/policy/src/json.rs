//! Policies and searches as JSON: `{"name":"isolated","search":{"name":"annealing","seed":7}}`.
//!
//! All options of the policy or search must be present, and no others.

use std::borrow::Cow;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::policy::{Policy, PolicyOption, PolicyOptions, Search};
use crate::registry::GivenOptions;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyFields<'a> {
    name: Cow<'a, str>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    search: Option<Search>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    idle_tax: Option<f64>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SearchFields<'a> {
    name: Cow<'a, str>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
}

impl Serialize for Policy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let PolicyOptions { search, idle_tax } = *self.options();
        let fields = PolicyFields {
            name: self.row().name.into(),
            search: self.takes(PolicyOption::Search).then_some(search),
            idle_tax: self.takes(PolicyOption::IdleTax).then_some(idle_tax),
        };
        fields.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Policy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let fields = PolicyFields::deserialize(deserializer)?;
        let mut policy = Self::by_name(
            &fields.name,
            GivenOptions {
                search: fields.search.map(Search::name),
                seed: fields.search.and_then(Search::seed),
                idle_tax: fields.idle_tax,
            },
        )
        .map_err(Error::custom)?;
        if policy.row().name != fields.name {
            // A preset is written as the policy that it abbreviates.
            return Err(Error::custom(format_args!(
                "there is no policy '{}'",
                fields.name
            )));
        }
        for (option, is_given) in [
            (PolicyOption::Search, fields.search.is_some()),
            (PolicyOption::IdleTax, fields.idle_tax.is_some()),
        ] {
            if policy.takes(option) && !is_given {
                return Err(Error::missing_field(option.key()));
            }
        }
        policy.options.search = fields.search.unwrap_or_default();
        Ok(policy)
    }
}

impl Serialize for Search {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let fields = SearchFields {
            name: self.name().into(),
            seed: self.seed(),
        };
        fields.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Search {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let fields = SearchFields::deserialize(deserializer)?;
        let search = Self::by_name(&fields.name, fields.seed).map_err(Error::custom)?;
        if search.seed().is_some() && fields.seed.is_none() {
            return Err(Error::missing_field(PolicyOption::Seed.key()));
        }
        Ok(search)
    }
}

/// The schemas for the REST API's description.
#[cfg(feature = "schema")]
mod schema {
    use std::borrow::Cow;

    use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, OneOfBuilder, SchemaFormat, Type};
    use utoipa::openapi::{Ref, RefOr, Schema};
    use utoipa::{PartialSchema, ToSchema};

    use crate::policy::{Policy, PolicyOption, Search};
    use crate::registry::{POLICIES, SEARCHES};

    /// An object of this name with the option's field.
    fn object(name: &str, summary: &str, options: &[PolicyOption]) -> ObjectBuilder {
        let word = ObjectBuilder::new()
            .schema_type(Type::String)
            .enum_values(Some([name]));
        let mut object = ObjectBuilder::new()
            .description(Some(summary))
            .property("name", word)
            .required("name");
        for option in options {
            let field: RefOr<Schema> = match option {
                PolicyOption::Search => Ref::from_schema_name(<Search as ToSchema>::name()).into(),
                PolicyOption::IdleTax => number(Type::Number, KnownFormat::Double).into(),
                PolicyOption::Seed => number(Type::Integer, KnownFormat::Int64).into(),
            };
            object = object.property(option.key(), field).required(option.key());
        }
        object
    }

    fn number(of: Type, format: KnownFormat) -> Schema {
        let format = SchemaFormat::KnownFormat(format);
        let number = ObjectBuilder::new().schema_type(of).format(Some(format));
        number.minimum(Some(0)).into()
    }

    impl PartialSchema for Policy {
        fn schema() -> RefOr<Schema> {
            let policies = POLICIES.iter().fold(OneOfBuilder::new(), |all, row| {
                all.item(object(row.name, row.summary, row.options))
            });
            policies
                .description(Some("How memory is allocated."))
                .into()
        }
    }

    impl ToSchema for Policy {
        fn name() -> Cow<'static, str> {
            "Policy".into()
        }

        fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
            schemas.push((<Search as ToSchema>::name().into(), Search::schema()));
        }
    }

    impl PartialSchema for Search {
        fn schema() -> RefOr<Schema> {
            let searches = SEARCHES.iter().fold(OneOfBuilder::new(), |all, row| {
                let seed = row.search.seed().map(|_| PolicyOption::Seed);
                all.item(object(row.name, row.summary, seed.as_slice()))
            });
            let description = "How the best allocation is searched for.";
            searches.description(Some(description)).into()
        }
    }

    impl ToSchema for Search {
        fn name() -> Cow<'static, str> {
            "Search".into()
        }
    }
}
